// The tests, each a subcommand of the executable.
#pragma once

namespace test {

void products();  // gram and dots: every size, number of clients and address
void mixing();    // mix and gram_mix, likewise; maxima of integers, marks of what is not finite
void times();     // gram_times, likewise
void ranking();   // ranked_means, likewise
void ranking_glance();
void conversions();   // every 16-bit float
void streaming();     // outputs stored past the cache
void threads();       // the same bits for any number; many callers; calls within calls
void forking();       // a child that uses the kernels
void interrupting();  // calls that are told to stop
void waking();        // one of those, at the worst moment
void glance();        // a little of everything, for valgrind

}  // namespace test
