"""What a run does: Pretrain, Finetune, and what both share."""
