"""A page about runs, from their files alone (docs/lab.md): metrics, trajectories, failures, settings.

    areal-x lab             # the runs of the folder runs/
    areal-x lab runs/NAME   # one of them
"""
