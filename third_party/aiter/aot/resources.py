def of(arch, asm, obj, threads, shared):
  return {}
