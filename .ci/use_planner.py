"""Use an installed planner without torch: plan, search, draw, read, and call the command line.

`make dist` runs this in an environment that has the wheel alone, whose folder is the first argument.
The current folder is written to.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path


def main(environment: Path) -> None:
    """Raise if anything does not work."""
    assert not any(map(importlib.util.find_spec, ("torch", "transformers"))), "this environment has torch"
    import shardscope as ss
    from shardscope_widgets import MemoryView, ScheduleView, Studio

    assert Path(ss.__file__).is_relative_to(environment), ss.__file__
    recipe, cluster = ss.Recipe(seq_len=8192, global_batch_size=64), ss.Cluster.parse("4x8xh100-sxm-80gb")
    plan = ss.Plan(ss.models["llama-3.1-70b"], cluster, recipe, ss.Layout.megatron(tp=8, pp=4))
    report = plan.memory()
    assert report.explain("activations") and plan.step().seconds > 0 and plan.export("exported")
    advice = ss.recommend(plan.architecture, cluster, recipe)
    assert advice.plan.memory().fits and advice.why

    page = ScheduleView(plan).to_html("schedule.html").read_text(encoding="utf-8")
    assert "<svg" in page or "plotly" in page
    assert "GiB" in report.to_html() and MemoryView(plan)._repr_mimebundle_() and Studio().plan.memory()

    small = ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.ddp()
    )
    try:
        ss.launch(small, ss.Pretrain(num_steps=1))
    except ImportError as error:
        assert 'pip install "shardscope[train]"' in str(error), error
    else:
        raise AssertionError("launched without torch")

    program = environment / "bin" / "shardscope"
    for arguments in (
        ["--version"],
        ["--help"],
        ["plan", "--help"],
        ["plan", "exported/plan.json"],
        ["runs"],
    ):
        done = subprocess.run([program, *arguments], check=True, capture_output=True, text=True)
        assert done.stdout.strip() or arguments == ["runs"], arguments
    print(
        f"shardscope {ss.__version__} without torch: plans, advises, exports, draws; the command line works."
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
