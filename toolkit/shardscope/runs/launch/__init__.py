"""From a plan and a task to ranks that run: the kernel's side, supervisor, launcher, rank."""
