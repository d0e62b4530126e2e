"""The kernels' thread pool: each item once, exclusive seats, forks, exits, unloading, and no cores held while idle."""

import ctypes
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from camshaft.kernels import native
from camshaft.kernels.dispatch import bind
from camshaft.kernels.op import OPS, load_families

load_families("cpu")
HOME = Path(native.__file__).parent
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Path of a library of the pool and ``pool_driver.c``."""
    compiler = native.find_compiler()
    if compiler is None:
        pytest.skip("needs a C compiler")
    target = tmp_path_factory.mktemp("driver") / "driver.so"
    flags = [flag for flag in native.FLAGS if flag != "-march=native"]
    sources = [Path(__file__).with_name("pool_driver.c"), HOME / "pool.c"]
    subprocess.run([*shlex.split(compiler), *flags, "-Wall", "-Wextra", "-Werror", "-shared", f"-I{HOME}",
                    *map(str, sources), "-o", str(target)], check=True)
    return target


def run_script(text, *arguments):
    subprocess.run([sys.executable, "-c", text, *map(str, arguments)], check=True, timeout=60)


@pytest.mark.parametrize("nested", [0, 1])
def test_every_item_is_done_once_and_seats_are_exclusive(driver, nested):
    assert ctypes.CDLL(str(driver)).drive(1500, nested, 7) == 0


def test_calls_from_several_threads_at_once_keep_apart(driver):
    assert ctypes.CDLL(str(driver)).drive_together(500) == 0


def test_two_copies_of_the_library_have_pools_of_their_own(driver, tmp_path):
    copy = tmp_path / "copy.so"
    copy.write_bytes(driver.read_bytes())
    with ThreadPoolExecutor(2) as threads:
        wrong = list(threads.map(lambda path: ctypes.CDLL(str(path)).drive(500, 0, 3), (driver, copy)))
    assert wrong == [0, 0]


def test_a_forked_child_works_on_with_workers_of_its_own(driver):
    run_script("import ctypes, os, sys\n"
               "library = ctypes.CDLL(sys.argv[1])\n"
               "assert library.drive(100, 0, 1) == 0\n"
               "for generation in range(3):\n"
               "    child = os.fork()\n"
               "    if child == 0:\n"
               "        os._exit(library.drive(100, 0, 2) or library.drive_together(20))\n"
               "    assert os.waitpid(child, 0)[1] == 0\n"
               "assert library.drive(100, 0, 3) == 0\n", driver)


def test_a_process_exits_while_a_thread_is_at_work(driver):
    run_script("import ctypes, sys, threading\n"
               "library = ctypes.CDLL(sys.argv[1])\n"
               "library.drive(10, 0, 1)\n"
               "threading.Thread(target=library.drive, args=(10**9, 0, 1), daemon=True).start()\n", driver)


@linux
def test_an_unloaded_library_leaves_no_thread_behind(driver):
    run_script("import _ctypes, ctypes, os, sys\n"
               "before = len(os.listdir('/proc/self/task'))\n"
               "for turn in range(5):\n"
               "    library = ctypes.CDLL(sys.argv[1])\n"
               "    assert library.drive(100, 0, turn) == 0\n"
               "    assert len(os.listdir('/proc/self/task')) > before\n"
               "    _ctypes.dlclose(library._handle)\n"
               "    assert len(os.listdir('/proc/self/task')) == before\n", driver)


@linux
def test_waiting_workers_sleep_and_take_no_signals(driver):
    run_script("import ctypes, sys, time\n"
               "from pathlib import Path\n"
               "def others():\n"
               "    texts = [path.read_text() for path in Path('/proc/self/task').glob('*/status')]\n"
               "    return [dict(line.split(':\\t', 1) for line in text.splitlines() if ':\\t' in line)\n"
               "            for text in texts]\n"
               "ctypes.CDLL(sys.argv[1]).drive(100, 0, 1)\n"
               "end = time.monotonic() + 30\n"
               "while any(t['State'][0] != 'S' for t in others() if t['Pid'] != t['Tgid']):\n"
               "    assert time.monotonic() < end\n"
               "workers = [t for t in others() if t['Pid'] != t['Tgid']]\n"
               "assert workers and all(int(t['SigBlk'], 16) & 2 for t in workers)\n", driver)


def test_no_kernel_uses_openmp(library):
    if library is None:
        pytest.skip("needs a C compiler")
    assert "-fopenmp" not in native.FLAGS
    assert not [path for path in HOME.glob("**/*.[ch]") if "#pragma omp" in path.read_text()]


def test_kernels_called_at_once_give_the_bits_they_give_alone(library):
    if library is None:
        pytest.skip("needs a C compiler")
    linear = bind(OPS.get("linear"), "native", library)
    generator = torch.Generator().manual_seed(6)
    x, weight = torch.randn(9, 64, generator=generator), torch.randn(900, 64, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        wanted, barrier = linear(x, weight, None), threading.Barrier(3)

        def often(_):
            barrier.wait()
            return all(torch.equal(linear(x, weight, None), wanted) for _ in range(50))

        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(often, range(3))) == [True] * 3
    finally:
        torch.set_num_threads(before)


def test_threads_are_never_more_than_asked_for_after_a_call_with_more(driver):
    """``drive`` checks seats against each call's own limit; workers hired for a larger one must stay out."""
    loaded = ctypes.CDLL(str(driver))
    assert [loaded.drive(200, 0, seed) for seed in range(5)] == [0] * 5
