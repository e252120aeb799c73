"""From a plan and a task to running ranks: the kernel's side, supervisor, launcher and rank."""
