import gc

import pytest

from hf_pretrain.runtime.importing import collector_paused


def test_objects_of_the_libraries_are_exempt_from_collection():
    """Importing the package created these objects. Collections run again since then."""
    assert gc.isenabled()
    assert gc.get_freeze_count() > 200_000


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), collector_paused():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
