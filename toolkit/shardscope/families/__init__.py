"""Model families, one record each: config.json, parameter names and shapes, modules, allowed fields, support."""
