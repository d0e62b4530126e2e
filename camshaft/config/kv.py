"""What a KV cache must hold, as plain data: the part of an engine that executor and runtime share.

Owns life cycles and page geometry; counts nothing and allocates nothing.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

PAGES_AHEAD = 4
"""A generating row takes its pages a few at a time: asking for one costs several times the row's share of a
step. They come out of what the row was promised, so they keep nobody out."""
_DTYPE_BYTES = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


def reserved_ahead(chunk_tokens: int, page_size: int) -> int:
    """Most positions of a row that are reserved before the step that computes them was submitted."""
    return max(chunk_tokens, PAGES_AHEAD * page_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LifeCycleSpec:
    """Layers whose cached tokens live and die together, and the shape of one of their pages.

    A page of one layer is ``[2, num_kv_heads, page_size, head_dim]`` (0 = keys, 1 = values);
    a life cycle's pool is ``[num_layers, num_pages, 2, num_kv_heads, page_size, head_dim]``.
    Page 0 is the trash page: padding writes there, nothing reads it.
    """

    kind: str
    """``"full"``: every token stays until its request ends. ``"window"``: tokens go once no later token reads them."""
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    page_size: int
    """Tokens a page."""
    dtype: str
    window: int | None = None
    """Of ``"window"``: how many tokens back a token reads, itself included."""
    sinks: int = 0
    """Of ``"window"``: tokens at the start that every token reads however far back they are."""

    def __post_init__(self) -> None:
        sound = {"window": self.window is not None and self.window >= 1 and self.sinks >= 0,
                 "full": self.window is None and not self.sinks}
        if not sound.get(self.kind, True):
            raise ValueError(f"a life cycle {self.kind!r} with window {self.window} and {self.sinks} sinks")
        if min(self.num_kv_heads, self.head_dim, self.page_size) < 1 or self.dtype not in _DTYPE_BYTES:
            raise ValueError(f"a life cycle of {self.num_kv_heads} KV heads of {self.head_dim} {self.dtype} in pages "
                             f"of {self.page_size} tokens")

    @property
    def page_bytes(self) -> int:
        """Bytes one page takes over all layers of the life cycle."""
        per_layer = 2 * self.num_kv_heads * self.page_size * self.head_dim
        return len(self.layers) * per_layer * _DTYPE_BYTES[self.dtype]

    def pool_shape(self, num_pages: int) -> tuple[int, int, int, int, int, int]:
        """Shape of the pool tensor holding ``num_pages`` pages, the trash page included."""
        return (len(self.layers), num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)

    def worst_pages(self, num_tokens: int, step_tokens: int) -> int:
        """Most pages a sequence that grows to ``num_tokens`` holds at any time.

        At most ``step_tokens`` positions from the first that is not computed have pages; what is out of reach of
        the computed ones was given back. ``window - 1 + step_tokens`` positions in a row and the sinks are left.
        """
        pages = -(-num_tokens // self.page_size)
        if self.window is None:
            return pages
        touched = (self.window - 1 + step_tokens + self.page_size - 2) // self.page_size + 1
        return min(pages, -(-self.sinks // self.page_size) + touched)
