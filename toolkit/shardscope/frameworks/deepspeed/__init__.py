"""DeepSpeed ZeRO: layout, formulas, engine, rehearsal and exported files."""
