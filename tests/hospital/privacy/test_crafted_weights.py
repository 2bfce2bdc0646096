"""Images in an update, for whoever chooses the weights: promise A leaves them open, promise B closes them."""

import pytest
import reconstruction


@pytest.mark.slow  # 24 photographs through 514 channels
def test_a_photograph_comes_back_from_one_update(tmp_path):
    """The number of docs/threats.md."""
    assert reconstruction.correlations(tmp_path)[0] > 0.9


def test_with_epsilon_nothing_of_such_a_network_leaves(tmp_path):
    with pytest.raises(RuntimeError, match="it trains with differential privacy"):
        reconstruction.correlations(tmp_path, privacy={"epsilon": 8})
