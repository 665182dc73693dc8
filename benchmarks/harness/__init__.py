"""What measuring is made of; knows no environment and no collector.

=================  ============================================================
file               its one job
=================  ============================================================
``served.py``      one system in processes of its own, every answer with a deadline
``processes.py``   the processes of a system: CPU, memory, stop, go on, kill
``windows.py``     what a system counts in a window
``contest.py``     several systems, measured in turn, window by window
``turns.py``       several calls of this process, measured in turn
``control.py``     a fixed loop that shows whether the machine was disturbed
``budget.py``      how long a window may be, so that everything fits the time
``estimates.py``   medians with intervals, of values and of paired ratios
``machine.py``     what a run ran on
``results.py``     the run's JSON, written after every experiment
=================  ============================================================
"""
