"""A plan written as other tools' files, ``plan.export(folder)``, and read from them,
``Plan.from_...(file)``.
"""
