"""The kinds of answer a workload can ask for, one module a kind; `kind` says what each of them must tell."""
