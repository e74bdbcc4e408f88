"""What is known of models of transformers and PEFT: facts of modules and files, which rooms above act on."""
