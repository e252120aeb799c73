"""Tasks: ``Pretrain`` and ``Finetune``, their common base, and which checkpoint a run may resume from."""
