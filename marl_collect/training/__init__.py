"""Training and comparing setups, with TorchRL's losses: ``marl-collect compare``.

Stands above the engine and the models, and is imported by neither. Needs the extra
``compare``.

============================  =====================================================
file                          its one job
============================  =====================================================
``options.py``                every setting of a run; the setups that are compared
``presets.py``                settings for tasks that were tried
``learner.py``                what learners offer
``ppo.py``                    IPPO and MAPPO
``critics.py``                their critics
``rewards.py``                each agent's own reward, or the team's
``value_decomposition.py``    VDN and QMIX
``epsilon.py``                their exploration
``trainer.py``                one run: collect, train, evaluate, save, resume
``evaluating.py``             its evaluations
``costs.py``                  parameters, memory, time of a gradient step
``run_folder.py``             the files of a run
``tensorboard.py``            the same metrics for TensorBoard
``video.py``                  an episode of trained weights as a video
``comparison.py``             all runs of a comparison, and its report
``results.py``                results of runs, aggregated over seeds
``intervals.py``              interquartile means and bootstrap intervals
``report.py``                 tables for the terminal and for a page
``curves.py``                 learning curves as a picture
``marl_eval.py``              the JSON that marl-eval and BenchMARL share
============================  =====================================================
"""
