"""SmolLM2 learns sixty answers about an invented product: ``make finetune-proof`` writes docs/finetune.md."""
