"""Ways to predict a gain, against references written out in the test."""

import numpy as np
import pytest

from medfedaug.analysis.gain_effects import GainRows, Nearest, distance_to_nearest, ways_to_predict

NAMES = ("near", "far", "patients")


def rows(number=12, seed=0):
    R = np.random.RandomState(seed)
    x = R.normal(2, 3, (number, 3))
    y = 0.2 * x[:, 0] - 0.1 * x[:, 1] + R.normal(0, 0.05, number)
    # Federation 0 has three rows, the others one each.
    federations = np.array(["0"] * 3 + [str(k) for k in range(1, number - 2)])
    return GainRows(x, y, np.zeros(number), np.array([name[-1:] for name in federations]), federations)


def way(name, signs=(0, 0, 0)):
    return next(one for one in ways_to_predict(signs) if one.name == name)


def test_the_simplest_come_first_and_a_federation_counts_once():
    names = [one.name for one in ways_to_predict((0, 0, 0))]
    assert names[:2] == ["0", "mean"]
    given = rows()
    assert way("0").fit(given)(given.x).tolist() == [0.0] * 12
    by_federation = [given.y[given.federations == name].mean() for name in sorted(set(given.federations))]
    np.testing.assert_allclose(way("mean").fit(given)(given.x[:2]), np.mean(by_federation))
    assert "always the mean" in way("mean").fit(given).explain(NAMES)


def test_without_signs_a_line_is_ridge_regression():
    given = rows()
    weights = np.array([1 / 3] * 3 + [1.0] * 9)
    middle = np.average(given.x, axis=0, weights=weights)
    scale = np.sqrt(np.average((given.x - middle) ** 2, axis=0, weights=weights))
    z, mean = (given.x - middle) / scale, np.average(given.y, weights=weights)
    beta = np.linalg.solve((z.T * weights) @ z + 3 * np.eye(3), (z.T * weights) @ (given.y - mean))
    x = np.array([[2.0, 2.0, 2.0], [1.0, 3.0, 0.0]])
    line = way("line, 3").fit(given)
    np.testing.assert_allclose(line(x), mean + (x - middle) / scale @ beta, rtol=1e-6)
    assert f"near {beta[0]:+.3f}, far {beta[1]:+.3f}" in line.explain(NAMES)


def test_a_slope_has_the_sign_that_is_given_and_no_prediction_is_beyond_what_was_measured():
    given = rows()
    line = way("line, 1", (1, 1, 0)).fit(given)
    assert line.slopes[0] > 0.1
    assert line.slopes[1] == 0
    turned = way("line, 1", (-1, -1, 0)).fit(given)
    assert turned.slopes[0] == 0
    assert turned.slopes[1] < -0.05
    far = line(np.array([[1e6, 0, 0], [-1e6, 0, 0]]))
    assert far.tolist() == [given.y.max(), given.y.min()]


def test_the_nearest_federations_are_averaged():
    given = GainRows(
        np.array([[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]]),
        np.array([1.0, 2.0, 3.0, 7.0, 8.0, 9.0]),
        np.zeros(6),
        np.array(list("ababab")),
        np.array(list("uvwxyz")),
    )
    found = Nearest(given, number=4)
    np.testing.assert_allclose(found(np.array([[-5.0], [50.0]])), [13 / 4, 27 / 4])
    assert "4 nearest federations" in found.explain(["one"])
    scale = given.x.std()
    np.testing.assert_allclose(
        distance_to_nearest(given, np.array([[5.0], [12.0]])), [3 / scale, 0], atol=1e-6
    )


def test_what_is_left_out_takes_no_part():
    given = rows()
    seen = []

    def use(others, x):
        seen.append((set(others.families), len(x)))
        return np.full(len(x), float(len(others.y)))

    found = given.left_out(use)
    for families, number in seen:
        assert len(set(given.families) - families) == 1
        assert number == len(given.y) - found[given.families == (set(given.families) - families).pop()][0]
    alone = GainRows(given.x, given.y, given.variances, np.array(["one"] * 12), given.federations)
    assert alone.left_out(use).tolist() == [9.0] * 3 + [11.0] * 9


@pytest.mark.parametrize("name", ["line, 1", "nearest"])
def test_a_feature_that_never_varies_says_nothing(name):
    given = rows()
    given.x[:, 2] = 5
    found = way(name).fit(given)
    assert np.isfinite(found(np.array([[1.0, 1.0, 5.0]]))).all()
