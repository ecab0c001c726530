"""A store of many processes in one, with time, network, disks and faults that a seed decides.

The code under test is the store's own: its modules are given other ``threading``, ``time``, ``secrets`` and
``random`` (substitution.py), another transfer engine (engine.py), another coordination service
(coordination.py) and other files (disk.py).
"""
