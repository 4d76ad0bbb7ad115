// For editors without a CUDA toolkit, behind emu.h: inline PTX of kernels/src/ptx is nothing here.
#pragma once

inline unsigned long long __cvta_generic_to_shared(const void* p) { return (unsigned long long)p; }

extern int tw_asm;
#define asm tw_asm
#define tw_asm(...) ((void)0)
#define volatile(...)
