"""``ss.calibrate()``: rank processes that measure this machine; the kernel never imports torch for it.

``process.py`` runs in the kernel: it starts the ranks, listens to the first, and ends all of them. What each
of them runs is ``rank.py``, how it times ``stopwatch.py``, what it measures ``curves.py``. What a calibration
is, and what a prediction takes from it, is in ``timing/calibration/curves.py``.
"""
