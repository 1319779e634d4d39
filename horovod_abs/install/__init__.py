"""Gets Horovod built for the frameworks that are installed: ``horovod-abs install-horovod``.

``source`` holds the released source and our edits to it; ``target`` what a build depends on;
``requirements`` what it needs from the machine; ``installed`` looks at a Horovod that is there;
``wheel`` puts them together. Failures are `problems.SetupError`, each with its remedy.
"""
