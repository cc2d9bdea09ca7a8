"""Every name that the package and the recipes pass to `load_named` exists."""

import re

import pytest

from hf_pretrain.runtime.named import load_named
from tests.invariants.launching import ROOT


FILES = [*ROOT.glob("hf_pretrain/**/*.py"), *ROOT.glob("recipes/*.py")]
NAMES = {name for path in FILES for name in re.findall(r'"(hf_pretrain(?:\.\w+)+:\w+)"', path.read_text("utf-8"))}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_in_the_code_exists(name):
    assert load_named(name) is not None
