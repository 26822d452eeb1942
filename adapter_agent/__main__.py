"""`python -m adapter_agent ...` is `adapt ...`."""

from adapter_agent.cli import main

if __name__ == "__main__":
    main()
