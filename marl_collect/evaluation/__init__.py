"""Evaluates policies on whole episodes, alone and against other policies.

====================  ===========================================================
file                  contents
====================  ===========================================================
``evaluator.py``      ``evaluate`` and ``Evaluator``, which play the episodes
``cross_playing.py``  every policy of a population against every policy
``scenarios.py``      focal and background populations, as in MeltingPot
``intervals.py``      interquartile means and bootstrap intervals
====================  ===========================================================

Evaluations use the workers of collectors.
"""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.evaluation.cross_playing import CrossPlay as CrossPlay
    from marl_collect.evaluation.cross_playing import cross_play as cross_play
    from marl_collect.evaluation.intervals import Interval as Interval
    from marl_collect.evaluation.scenarios import Scenario as Scenario
    from marl_collect.evaluation.scenarios import ScenarioScore as ScenarioScore
    from marl_collect.evaluation.scenarios import (
        evaluate_scenarios as evaluate_scenarios,
    )

__getattr__, __dir__ = lazy.attach(__name__)
