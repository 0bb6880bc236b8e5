"""The language of methods: parts, record, registry, text form, and what client code reads."""
