"""Numbers by which codecs are chosen and constructed."""

import numpy as np
import pytest

from nfdt.codecs.adaptive import LinkEstimate
from nfdt.codecs.base import relative_error
from nfdt.codecs.sparse import TopK


def test_a_vector_of_zeros_loses_nothing():
    zeros = np.zeros(3, np.float32)
    assert relative_error(zeros, zeros) == 0.0


@pytest.mark.parametrize(
    ("fraction", "size", "kept"), [(0.5, 3, 2), (0.05, 21, 2), (0.05, 1, 1), (1.0, 7, 7), (0.5, 0, 0)]
)
def test_top_k_keeps_no_less_than_its_fraction(fraction, size, kept):
    assert TopK(fraction).kept(size) == kept


def test_an_exchange_that_takes_very_long_counts_as_four_times_the_expectation():
    links = []
    for outlier in (4.0, 1000.0):
        estimate = LinkEstimate(1000)
        for size in (100, 1000) * 10:
            estimate.exchanged(size, size, 0.001 + 1e-5 * size)
        estimate.exchanged(1000, 1000, outlier * 0.011)
        links.append(estimate.link())
    assert links[1].seconds(1000, 1000) == pytest.approx(links[0].seconds(1000, 1000), rel=1e-3)
