"""Trains and compares setups of algorithms: ``marl-collect compare``.

Neither the engine nor the models import this package. Needs the extra ``compare``.

============================  =====================================================
file                          contents
============================  =====================================================
``options.py``                settings of a run; the setups that are compared
``convolutions.py``           the setting ``conv``
``presets.py``                settings for tasks that were tried
``algorithms.py``             table of algorithms
``learner.py``                base class of learners; training rewards
``advantages.py``             advantages of agents that wait, die, or share a reward
``ppo.py``                    IPPO and MAPPO
``off_policy.py``             base class of learners with replay and target networks
``value_decomposition.py``    IQL, VDN and QMIX
``maddpg.py``                 MADDPG and IDDPG
``replay_buffer.py``          replay buffer of frames or whole episodes
``trainer.py``                one run: collects, trains, evaluates, saves, resumes
``checkpoint.py``             saves and resumes a training loop
``evaluating.py``             evaluations of a run
``allocator.py``              keeps freed memory for the next activations
``run_folder.py``             files of a run, TensorBoard's included
``comparison.py``             all runs of a comparison
``side_by_side.py``           several of them at a time
``results.py``                results of runs, aggregated over seeds
``report.py``                 tables, and JSON for marl-eval
``plots.py``                  learning curves, final scores, sample efficiency
============================  =====================================================
"""
