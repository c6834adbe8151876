"""Faults by the hundred: runs killed, files mangled, disks full, workers gone, and the same bits whatever happens.

    python -m tests.campaigns NAME [--n N] [--seed S] [--only NUMBER] [--device DEVICE]

Every trial has a number, and is repeated by it; those of ``device``, which compares the CPU with another one, also by a
part of their names. The short forms are tests; what the long ones found stands in ``docs/reliability.md``.
"""
