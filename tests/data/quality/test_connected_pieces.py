import numpy as np

from medfedaug.data.quality.connected_pieces import connected_pieces


def test_a_corner_connects_in_the_plane_and_in_space():
    plane = np.zeros((5, 5), bool)
    plane[0, 0] = plane[1, 1] = plane[4, 4] = True
    assert connected_pieces(plane) == 2
    space = np.zeros((4, 4, 4), bool)
    space[0, 0, 0] = space[1, 1, 1] = space[3, 3, 3] = space[3, 3, 1] = True
    assert connected_pieces(space) == 3
    assert connected_pieces(np.zeros((3, 3), bool)) == 0
