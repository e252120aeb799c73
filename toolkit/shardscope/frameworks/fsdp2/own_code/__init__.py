"""What FSDP2 has to say of a person's own training code: units, and what became of FSDP1."""
