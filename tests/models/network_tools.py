"""A small network that the tests of all networks build, and its sizes."""

import itertools

from marl_collect.models import MultiAgentMLP

SETUPS = list(itertools.product([False, True], [False, True]))
N, INPUTS, OUTPUTS = 3, 5, 4


def network(centralised, share_params, n_inputs=INPUTS, **options):
    options = {"depth": 2, "num_cells": 8} | options
    return MultiAgentMLP(
        n_inputs,
        OUTPUTS,
        N,
        centralised=centralised,
        share_params=share_params,
        **options,
    )
