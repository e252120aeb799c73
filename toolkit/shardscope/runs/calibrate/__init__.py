"""``ss.calibrate()``: rank processes that measure this machine, without importing torch in the kernel.

``process.py`` runs in the kernel: it starts the ranks, reads the first one's output, and ends all of them.
``rank.py`` is the program of a rank, ``stopwatch.py`` its timing and ``curves.py`` the measured operators.
``timing/calibration/curves.py`` defines a calibration and its use in predictions.
"""
