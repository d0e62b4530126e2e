"""A request's sampling values are held to what a step can carry before it queues: one bad request costs only itself."""

import dataclasses

import numpy as np
import pytest

from camshaft.core.errors import UserError
from camshaft.testing.executor_rig import ExecutorRig


@pytest.mark.parametrize(("field", "value"), [
    ("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1),
    ("top_k", 2**31), ("top_p", 1.5), ("min_p", float("nan")), ("seed", -1), ("seed", 2**64), ("choice", 2**31),
    ("suppressed_token_ids", np.array([50], np.int32)), ("suppressed_token_ids", np.array([-1], np.int32))])
def test_sampling_values_a_step_cannot_carry_are_refused_by_field(field, value):
    rig = ExecutorRig()
    request = rig.request([1, 2], 4)
    with pytest.raises(UserError) as refused:
        rig.submit(dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **{field: value})))
    assert refused.value.field == field
    fine = rig.add([1, 2], 4)
    rig.run()
    assert rig.told[fine].end == "length"
    rig.check_drained()
