"""Selection of the speeds that predictions use: this machine's calibration, or else the catalogue's.

``store.py`` and the classes of calibrations are imported only if a calibration is stored.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.machine.host import count_cores
from shardscope.timing.calibration.files import (
    FOLDER_VARIABLE,
    NotStoredError,
    build_file_name,
    find_data_folder,
    get_machine_name,
    read_stamp,
)
from shardscope.timing.rates import look_up_rates

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster
    from shardscope.timing.rates import Rates


def select_rates(cluster: Cluster) -> Rates:
    """Return the speeds of ``cluster``: this machine's calibration if it matches, else the catalogue's.

    Cheap enough to call on every step: files are read only when they change. Raises ``ValueError`` for a
    damaged stored calibration, naming its file.
    """
    return _load_stored_rates(cluster) or look_up_rates(cluster)


def _load_stored_rates(cluster: Cluster) -> Rates | None:
    """Return the rates of the stored calibration that matches ``cluster``, or None.

    Takes microseconds if no file has changed. Raises as ``store.read_record`` does.
    """
    # Called for every predicted step: two stat() calls decide whether the cached rates still hold.
    folder = _find_calibration_folder(os.environ.get(FOLDER_VARIABLE), os.environ.get("XDG_DATA_HOME"))
    folder_stamp = read_stamp(folder)
    if folder_stamp is None:
        return None
    gpu = cluster.gpu.name
    file_stamp = read_stamp(f"{folder}/{build_file_name(get_machine_name(), gpu)}")
    # Calibrations of other hosts in the same folder count only if this one has none.
    others_stamp = None if file_stamp or gpu == "cpu" else folder_stamp
    if file_stamp is None and others_stamp is None:
        return None
    return _compute_rates(cluster, folder, file_stamp, others_stamp, count_cores() if gpu == "cpu" else None)


@lru_cache(maxsize=64)
def _compute_rates(cluster: Cluster, folder: str, *_stamps: object) -> Rates | None:
    # The stamps are part of the cache key: a changed file is read again.
    from shardscope.timing.calibration.store import find_calibration, find_traced_rates
    from shardscope.timing.calibration.traced import apply_traced_rates

    calibration = find_calibration(cluster, Path(folder).parent)
    rates = None if calibration is None else calibration.rates(cluster)
    traced = find_traced_rates(cluster, Path(folder).parent)
    return rates if traced is None else apply_traced_rates(rates or look_up_rates(cluster), traced)


@lru_cache(maxsize=8)
def _find_calibration_folder(_named: str | None, _base: str | None) -> str:
    # The arguments are the cache's key: the environment may change within a session.
    try:
        return str(find_data_folder() / "calibration")
    except NotStoredError:
        return ""  # Of which there is no file; predictions need none.
