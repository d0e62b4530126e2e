"""What is downloaded from the hub is what a folder is read from: a hub model and its copy on disk are one model."""

import fnmatch

from camshaft.frontend.hf_folder import HfFolderCheckpoint
from camshaft.frontend.hub import ALLOWED_FILES
from camshaft.testing.tiny import write_tiny_llama


def test_every_file_that_is_read_is_downloaded(tmp_path):
    folder = write_tiny_llama(tmp_path, num_shards=2)
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<|end|>"}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    read = {path.name for path in HfFolderCheckpoint(folder).files}
    assert read == {path.name for path in folder.iterdir()}
    assert [name for name in sorted(read) if not any(fnmatch.fnmatch(name, each) for each in ALLOWED_FILES)] == []
