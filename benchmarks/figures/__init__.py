"""Small figures: runners whose windows hold other things than frames.

=====================  ========================================================
file                   its one job
=====================  ========================================================
``worker_cost.py``     what a frame costs a worker beside environment and policy
``parent_cost.py``     what a step of ParallelEnv costs the trainer
``weights.py``         publishing and pulling weights; whether a set is ever torn
``startup.py``         sixteen more workers: until ready, and their memory
``failure.py``         until a kill is noticed; until everything has ended
``prefetch.py``        collecting while a learner works
=====================  ========================================================
"""
