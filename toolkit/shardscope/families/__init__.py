"""Model families, one record each: config.json, parameter names and shapes, modules, fields, support."""
