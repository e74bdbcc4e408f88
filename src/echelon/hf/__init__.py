"""Facts about models of transformers and PEFT and their files. parallel, checkpoint and loop act on them."""
