"""/infill, as llama.cpp's server has it for llama.vim and llama.vscode."""
