#define FASTAGG_LEVEL avx2
#include "kernels-inl.h"
