"""Megatron-core: layout, formulas, engine, rehearsal and exported files."""
