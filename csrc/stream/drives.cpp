#include "stream/drives.h"

#include <algorithm>

namespace moestro {
namespace {

constexpr int64_t kWindowBytes = int64_t{8} << 20;
constexpr double kFading = 0.875;  // per window
constexpr int64_t kPassedOverMost = 64;

}  // namespace

int Drives::choose(uint64_t usable, int64_t bytes) {
  double fastest = 0;
  for (const Tracked& t : drives_) fastest = std::max(fastest, t.drive.rate);
  int best = -1;
  double least = 0;
  for (int d = 0; d < int(drives_.size()); ++d) {
    if ((usable >> d & 1) == 0) continue;
    const Tracked& t = drives_[size_t(d)];
    // One that is not known yet is worth a try.
    const double rate = t.drive.rate > 0 ? t.drive.rate : std::max(2 * fastest, 1.0);
    const double until = double(t.drive.in_flight + bytes) / rate;
    const bool overdue = t.drive.in_flight == 0 && t.passed_over >= kPassedOverMost;
    if (best < 0 || overdue || until < least) {
      best = d;
      least = until;
    }
    if (overdue) break;
  }
  for (int d = 0; d < int(drives_.size()); ++d) {
    Tracked& t = drives_[size_t(d)];
    t.passed_over = d == best ? 0 : t.passed_over + 1;
  }
  return best;
}

void Drives::pass_time(Tracked& t, Time now) {
  if (t.drive.in_flight > 0 && now > t.since) {
    const double seconds = std::chrono::duration<double>(now - t.since).count();
    t.drive.seconds += seconds;
    t.window_seconds += seconds;
  }
  t.since = now;
}

void Drives::begin(int drive, int64_t bytes, Time now) {
  Tracked& t = drives_[size_t(drive)];
  pass_time(t, now);
  t.drive.in_flight += bytes;
}

void Drives::end(int drive, int64_t bytes, int64_t got, Time now) {
  Tracked& t = drives_[size_t(drive)];
  pass_time(t, now);
  t.drive.in_flight -= bytes;
  t.drive.bytes += got;
  t.window_bytes += got;
  if (t.window_bytes < kWindowBytes || t.window_seconds <= 0) return;
  // Of sums, not a mean of rates: completions come in bunches, after which time stands still.
  t.recent_bytes = kFading * t.recent_bytes + double(t.window_bytes);
  t.recent_seconds = kFading * t.recent_seconds + t.window_seconds;
  t.drive.rate = t.recent_bytes / t.recent_seconds;
  t.window_bytes = 0;
  t.window_seconds = 0;
}

}  // namespace moestro
