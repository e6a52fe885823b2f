"""The room by subject, and its flat names."""

from importlib import import_module

import pytest

import curvescope as cs
from curvescope.closed_form import flat_names
from curvescope.closed_form.attention.split import block_split
from curvescope.closed_form.norms.third import norm_third_along
from curvescope.closed_form.softmax.third import cumulants


@pytest.mark.parametrize("name", sorted(flat_names.NAMES))
def test_a_flat_name_gives_everything_that_its_modules_define(name):
    flat = import_module(f"curvescope.closed_form.{name}")
    assert getattr(cs.closed_form, name) is flat
    for home in flat_names.NAMES[name].split():
        module = import_module(f"curvescope.closed_form.{home}")
        own = [
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        ]
        assert own
        for key in own:
            assert getattr(flat, key) is getattr(module, key)


def test_flat_names_work_in_every_kind_of_import():
    from curvescope.closed_form.attention_split import block_split as flat

    from curvescope.closed_form import third_order

    assert flat is block_split
    assert third_order.norm_third_along is norm_third_along
    assert third_order.cumulants is cumulants
    with pytest.raises(AttributeError, match="third_order' has no attribute 'fifth'"):
        third_order.fifth  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'attention_cores'"):
        cs.closed_form.attention_cores  # noqa: B018
