"""The language of methods: parts, the method record, the registry, the text form, and the values that client code reads."""
