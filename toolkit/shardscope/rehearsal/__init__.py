"""Rehearsals: a framework's own code on fake tensors, one rank of any world size, without a GPU.

``plan.rehearse()`` starts one child process (``frameworks/rehearsal_process.py``) that makes the world of one
rank and asks the framework's package to play a step; the child's only answer is JSON. The kernel never
imports torch for it.

What a framework offers is ``frameworks/<name>/rehearsal/rehearse.py`` with ::

    def rehearse(plan: Plan, note_progress: Callable[[str, float], None]) -> list[RehearsedStage]: ...

It runs in the child, calls ``note_progress(words, fraction_done)`` now and then, and may use:

- ``fake_world.fake_ranks(world_size, rank=0)``: process groups that hallucinate their collectives. Make
  device meshes and groups inside it, but *outside* of ``fake_tensors(...)``;
- ``fake_world.fake_tensors(on_gpu=True)``: ``FakeTensorMode`` on CPU tensors, in which attention, dropout and
  powers take the operators that CUDA would take, and transformers does what it does on real tensors. Yields
  the ``Tracker``;
- ``tracker.Tracker``: follows every storage. ``tracker.phase("forward")`` names the moments; the label that a
  new storage takes is the innermost ``with tracker.labelling("gather_buffers")``, or else what the phase
  says (``DEFAULTS``: activations, in the optimizer's phase the optimizer); tensors whose last width is in
  ``tracker.logit_widths`` are logits. ``tracker.label(tensors, "gradients")`` renames storages, afterwards
  too: peaks are found when everything is known. ``with tracker.paused()`` sees nothing (a model built in host
  memory); ``label`` brings such tensors in. ``tracker.restart()`` begins the step that counts;
- ``tracker.stage(number, num_layers)``: the :class:`~shardscope.rehearsal.result.RehearsedStage` so far.

Labels are names of ``memory.report.COMPONENTS`` less communication, runtime and fragmentation, which no
tensor shows: the report adds them as the prediction does. What is not the plan itself but a stand-in (a
shrunken model, extrapolated) is said in ``RehearsedStage.note``.
"""
