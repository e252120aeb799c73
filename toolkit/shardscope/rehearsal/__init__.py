"""Rehearsals: a framework's own code on fake tensors, one rank of any world size, without a GPU.

``plan.rehearse()`` starts one child process (``frameworks/rehearsal_process.py``) that creates the process
groups of one rank and calls the framework's package to run a step; it returns JSON. The calling process (a
notebook's kernel) does not import torch.

A framework offers ``frameworks/<name>/rehearsal/rehearse.py`` with ::

    def rehearse(plan: Plan, note_progress: Callable[[str, float], None]) -> list[RehearsedStage]: ...

It runs in the child, calls ``note_progress(text, fraction_done)`` regularly, and may use:

- ``fake_world.fake_ranks(world_size, rank=0)``: process groups whose collectives return at once without
  communication. Create device meshes and groups inside it, but *outside* of ``fake_tensors(...)``;
- ``fake_world.fake_tensors(on_gpu=True)``: ``FakeTensorMode`` on CPU tensors, in which attention, dropout and
  powers dispatch to CUDA's operators, and transformers behaves as on real tensors. Yields the ``Tracker``;
- ``tracker.Tracker``: follows every storage. ``with tracker.phase("forward")`` sets the phase. A new storage
  gets the label of the innermost ``with tracker.label_new_storages("gather_buffers")``, otherwise the phase's
  default (``DEFAULTS``: activations, and optimizer in the optimizer phase); tensors whose last dimension is
  in ``tracker.logit_widths`` are logits. ``tracker.label(tensors, "gradients")`` relabels storages for the
  whole step: peaks are computed at the end. ``with tracker.pause()`` ignores storages (a model built in host
  memory); ``label`` adds such tensors. ``tracker.restart()`` begins the measured step;
- ``tracker.build_stage(number, num_layers)``: the :class:`~shardscope.rehearsal.result.RehearsedStage`.

Labels are names of ``memory.report.COMPONENTS`` without communication, runtime and fragmentation, which are
not tensors: the report adds their predicted values. ``RehearsedStage.note`` describes deviations from the
plan, such as a smaller model that is extrapolated.
"""
