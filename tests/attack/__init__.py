"""A fuzzer over run folders: ``python -m tests.attack`` damages recorded ones and opens them."""
