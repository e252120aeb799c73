"""SmolLM2 learns twenty facts about an invented product: ``make finetune-proof`` writes docs/finetune.md."""
