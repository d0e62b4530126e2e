"""Every GPU implementation of every op against its contract, on every dtype and sample, on the card itself."""

import pytest

from camshaft.kernels.op import OPS, load_families
from camshaft.testing import parity

pytestmark = pytest.mark.gpu
load_families("cuda")
CASES = [pytest.param(op, dtype, id=f"{op.spec.name}-{str(dtype)[6:]}")
         for op in OPS if not op.spec.name.startswith("test_") for dtype in op.spec.dtypes]


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_implementations_keep_the_contract(op, dtype):
    checked, reasons = 0, set()
    for impl in (name for name, impl in op.impls.items() if impl.device in ("cuda", "any")):
        for sample in parity.samples_of(op.spec.name, dtype, "cuda"):
            verdict = parity.verdict_of(op, impl, sample, None, "cuda")
            if verdict.ok:
                parity.check_impl(op, impl, sample, None)
                checked += 1
            else:
                reasons.add(f"{impl}: {verdict.reason}")
    if not checked:
        pytest.skip("; ".join(sorted(reasons)) or f"{op.spec.name} has no implementation for a GPU")
