// Streams, events and captures.

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <random>
#include <set>

#include "emulator.h"

namespace emulator {

namespace {

enum CaptureMode { global, thread_local_mode, relaxed };

struct Capture {
    int mode;
    std::thread::id thread;
    Stream* origin;
    bool valid = true;
    std::vector<Action> nodes;
};
using CapturePointer = std::shared_ptr<Capture>;

struct Work {
    Action action;
    std::vector<MarkPointer> after;
    MarkPointer mark;
    Crossing crossing;
};

}  // namespace

struct Stream {
    int device;
    unsigned flags;
    int priority;
    unsigned number;
    bool stopping = false;
    std::deque<Work> queue;
    MarkPointer last;  // of what was queued last
    CapturePointer capture;
    std::condition_variable ready;
};

struct Event {
    int device;
    unsigned flags;
    MarkPointer mark;
    CapturePointer capture;  // in which it was recorded
};

namespace {

std::condition_variable& passed = *new std::condition_variable;  // some mark was
std::mutex& bridge = *new std::mutex;                            // held by what crosses, in confidential mode
std::set<Stream*>& streams = *new std::set<Stream*>;
std::set<Event*>& events = *new std::set<Event*>;
std::set<CapturePointer>& captures = *new std::set<CapturePointer>;
std::map<int, Stream*>& legacy_streams = *new std::map<int, Stream*>;
thread_local std::map<int, Stream*> thread_streams;
thread_local int thread_mode = global;
unsigned created = 0;

using Guard = std::unique_lock<std::mutex>;

void wait_for(Guard& guard, const MarkPointer& mark) {
    if (mark) passed.wait(guard, [&] { return mark->passed; });
}

void serve(Stream* stream) {
    std::mt19937 random(stream->number);
    Guard guard(mutex);
    for (;;) {
        stream->ready.wait(guard, [&] { return stream->stopping || !stream->queue.empty(); });
        if (stream->queue.empty()) break;
        Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        for (const MarkPointer& mark : work.after) wait_for(guard, mark);
        if (work.action) {
            guard.unlock();
            if (settings().delay) usleep(random() % settings().delay);
            {
                Guard alone(bridge, std::defer_lock);
                if (settings().confidential && work.crossing != Crossing::none) {
                    alone.lock();
                    usleep(settings().toll);
                }
                work.action();
            }
            work.action = nullptr;
            guard.lock();
        }
        work.mark->time = std::chrono::steady_clock::now();
        work.mark->passed = true;
        passed.notify_all();
    }
    guard.unlock();
    delete stream;
}

// The rest of this namespace is called with the mutex held.

Stream* start_stream(int device, unsigned flags, int priority) {
    auto* stream = new Stream{device, flags, priority, ++created};
    streams.insert(stream);
    std::thread(serve, stream).detach();
    return stream;
}

// The stream of a handle; null if there is none. The default streams are those of the current device.
Stream* resolve(Stream* handle) {
    const auto number = reinterpret_cast<std::uintptr_t>(handle);
    if (number > 2) return streams.count(handle) ? handle : nullptr;
    Stream*& stream = (number == 2 ? thread_streams : legacy_streams)[current_device()];
    if (!stream) stream = start_stream(current_device(), 0, 0);
    return stream;
}

bool is_legacy(const Stream* stream) {
    auto found = legacy_streams.find(stream->device);
    return found != legacy_streams.end() && found->second == stream;
}

bool is_blocking(const Stream* stream) { return !(stream->flags & stream_non_blocking); }

bool has_ended(const CapturePointer& capture) { return !captures.count(capture); }

// Work on the legacy stream and on blocking streams of one device excludes each other.
std::vector<MarkPointer> implicit_dependencies(const Stream* stream) {
    std::vector<MarkPointer> marks;
    if (is_legacy(stream)) {
        for (const Stream* other : streams)
            if (other != stream && other->device == stream->device && is_blocking(other)) marks.push_back(other->last);
    } else if (auto found = legacy_streams.find(stream->device); is_blocking(stream) && found != legacy_streams.end()) {
        marks.push_back(found->second->last);
    }
    return marks;
}

// A use of the legacy stream depends on every blocking stream, which a capture does not allow.
Status require_no_implicit_capture(const Stream* stream) {
    if (!is_legacy(stream)) return success;
    for (const Stream* other : streams) {
        if (other->device == stream->device && is_blocking(other) && other->capture) {
            other->capture->valid = false;
            return capture_implicit;
        }
    }
    return success;
}

Status put(Stream* stream, Action action, MarkPointer after = nullptr, Crossing crossing = Crossing::none) {
    if (Status status = require_no_implicit_capture(stream)) return status;
    if (stream->capture) {
        if (!stream->capture->valid) return capture_invalidated;
        if (action) stream->capture->nodes.push_back(std::move(action));
        return success;
    }
    std::vector<MarkPointer> marks = implicit_dependencies(stream);
    if (after) marks.push_back(after);
    marks.erase(std::remove(marks.begin(), marks.end(), nullptr), marks.end());
    stream->last = std::make_shared<Mark>();
    stream->queue.push_back({std::move(action), std::move(marks), stream->last, crossing});
    stream->ready.notify_all();
    return success;
}

bool is_done(const Stream* stream) { return !stream->last || stream->last->passed; }

// Invalidate captures that do not bear an unsafe call of this thread, by the rules of cuThreadExchangeStreamCaptureMode.
Status refuse_unsafe() {
    if (thread_mode == relaxed) return success;
    Status status = success;
    for (const CapturePointer& capture : captures) {
        const bool here = capture->mode != relaxed && capture->thread == std::this_thread::get_id();
        if (here || (capture->mode == global && thread_mode == global)) {
            capture->valid = false;
            status = capture_unsupported;
        }
    }
    return status;
}

// Refuse to query or to wait for what is being captured.
Status refuse_captured(const CapturePointer& capture, Status status) {
    if (!capture || has_ended(capture)) return refuse_unsafe();
    capture->valid = false;
    return status;
}

}  // namespace

namespace {

// Call `use` with the stream of a handle.
template <typename Use>
Status with_stream(Stream* handle, Use use) {
    Guard guard(mutex);
    Stream* stream = resolve(handle);
    if (stream) return use(guard, stream);
    guard.unlock();
    violate("use of a stream that does not exist");
    return invalid_handle;
}

template <typename Use>
Status with_event(Event* event, Use use) {
    Guard guard(mutex);
    if (events.count(event)) return use(guard);
    guard.unlock();
    violate("use of an event that does not exist");
    return invalid_handle;
}

}  // namespace

// ---- streams ----

Status create_stream(Stream** stream, unsigned flags, int priority) {
    Guard guard(mutex);
    *stream = start_stream(current_device(), flags, priority);
    return success;
}

Status destroy_stream(Stream* handle) {
    if (reinterpret_cast<std::uintptr_t>(handle) <= 2) return invalid_handle;  // a default stream
    return with_stream(handle, [](Guard&, Stream* stream) {
        if (stream->capture) {
            stream->capture->valid = false;
            captures.erase(stream->capture);
        }
        streams.erase(stream);
        stream->stopping = true;
        stream->ready.notify_all();
        return success;
    });
}

Status stream_properties(Stream* handle, unsigned* flags, int* priority, int* device) {
    return with_stream(handle, [&](Guard&, const Stream* stream) {
        *flags = stream->flags, *priority = stream->priority, *device = stream->device;
        return success;
    });
}

Status query_stream(Stream* handle) {
    return with_stream(handle, [](Guard&, Stream* stream) -> Status {
        if (Status status = require_no_implicit_capture(stream)) return status;
        if (Status status = refuse_captured(stream->capture, capture_unsupported)) return status;
        return is_done(stream) ? success : not_ready;
    });
}

Status synchronize_stream(Stream* handle) {
    return with_stream(handle, [](Guard& guard, Stream* stream) -> Status {
        if (Status status = require_no_implicit_capture(stream)) return status;
        if (Status status = refuse_captured(stream->capture, capture_unsupported)) return status;
        // The legacy stream is done when the blocking streams are that it waits for.
        std::vector<MarkPointer> marks = is_legacy(stream) ? implicit_dependencies(stream) : std::vector<MarkPointer>{};
        marks.push_back(stream->last);
        for (const MarkPointer& mark : marks) wait_for(guard, mark);
        return success;
    });
}

namespace {

void drain(Guard& guard, std::function<bool(const Stream*)> chosen) {
    std::vector<MarkPointer> marks;
    for (const Stream* stream : streams)
        if (chosen(stream)) marks.push_back(stream->last);
    for (const MarkPointer& mark : marks) wait_for(guard, mark);
}

}  // namespace

Status synchronize_device() {
    Guard guard(mutex);
    const int device = current_device();
    for (const Stream* stream : streams) {
        if (stream->device != device || !stream->capture) continue;
        stream->capture->valid = false;
        return capture_unsupported;
    }
    if (Status status = refuse_unsafe()) return status;
    drain(guard, [device](const Stream* stream) { return stream->device == device; });
    return success;
}

void drain_all() {
    Guard guard(mutex);
    drain(guard, [](const Stream*) { return true; });
}

Status enqueue(Stream* handle, Action action, Crossing crossing) {
    return with_stream(handle, [&](Guard& guard, Stream* stream) -> Status {
        if (Status status = put(stream, std::move(action), nullptr, crossing)) return status;
        const bool awaited = crossing == Crossing::awaited && settings().confidential;
        if (awaited && !stream->capture) wait_for(guard, MarkPointer(stream->last));
        return success;
    });
}

bool on_wrong_device(Stream* handle) {
    {
        Guard guard(mutex);
        const Stream* stream = resolve(handle);
        if (!stream || stream->device == current_device()) return false;
    }
    count("on the wrong device");
    return true;
}

// ---- events ----

Status create_event(Event** event, unsigned flags) {
    Guard guard(mutex);
    *event = new Event{current_device(), flags, nullptr, nullptr};
    events.insert(*event);
    return success;
}

Status destroy_event(Event* event) {
    return with_event(event, [&](Guard&) {
        events.erase(event);
        delete event;
        return success;
    });
}

Status record_event(Event* event, Stream* handle) {
    bool same_device = true;
    Status status = with_stream(handle, [&](Guard&, Stream* stream) -> Status {
        if (!events.count(event)) return invalid_handle;
        same_device = event->device == stream->device;
        if (!same_device) return invalid_handle;
        if (Status refused = put(stream, nullptr)) return refused;
        event->capture = stream->capture;
        if (!stream->capture) event->mark = stream->last;
        return success;
    });
    if (!same_device) violate("an event is recorded on a stream of another device");
    return status;
}

Status wait_event(Stream* handle, Event* event) {
    return with_stream(handle, [&](Guard&, Stream* stream) -> Status {
        if (!events.count(event)) return invalid_handle;
        const bool captured = event->capture && !has_ended(event->capture);
        if (captured && !stream->capture) stream->capture = event->capture;  // the stream joins the capture
        if (!stream->capture) return put(stream, nullptr, event->mark);
        if (captured && stream->capture != event->capture) {
            stream->capture->valid = event->capture->valid = false;
            return capture_merge;
        }
        if (!captured && event->mark) {
            stream->capture->valid = false;
            return capture_isolation;
        }
        return put(stream, nullptr);
    });
}

Status query_event(Event* event) {
    return with_event(event, [&](Guard&) -> Status {
        if (Status status = refuse_captured(event->capture, captured_event)) return status;
        return !event->mark || event->mark->passed ? success : not_ready;
    });
}

Status synchronize_event(Event* event) {
    return with_event(event, [&](Guard& guard) -> Status {
        if (Status status = refuse_captured(event->capture, captured_event)) return status;
        wait_for(guard, MarkPointer(event->mark));
        return success;
    });
}

Status elapsed_time(float* milliseconds, Event* start, Event* stop) {
    Guard guard(mutex);
    if (!events.count(start) || !events.count(stop)) return invalid_handle;
    if ((start->flags | stop->flags) & event_disable_timing) return invalid_handle;
    if (!start->mark || !stop->mark) return invalid_handle;
    if (!start->mark->passed || !stop->mark->passed) return not_ready;
    *milliseconds = std::chrono::duration<float, std::milli>(stop->mark->time - start->mark->time).count();
    if (settings().confidential) *milliseconds = -*milliseconds;  // it may be, and is no time
    return success;
}

// ---- captures ----

Status begin_capture(Stream* handle, int mode) {
    return with_stream(handle, [&](Guard&, Stream* stream) -> Status {
        if (is_legacy(stream)) return capture_unsupported;
        if (stream->capture || mode < global || mode > relaxed) return invalid_value;
        stream->capture = std::make_shared<Capture>(Capture{mode, std::this_thread::get_id(), stream});
        captures.insert(stream->capture);
        return success;
    });
}

Status end_capture(Stream* handle, Graph** graph) {
    return with_stream(handle, [&](Guard&, Stream* origin) -> Status {
        *graph = nullptr;
        const CapturePointer capture = origin->capture;
        if (!capture) return invalid_value;
        if (capture->origin != origin) return capture_unmatched;
        if (capture->mode != relaxed && capture->thread != std::this_thread::get_id()) return capture_wrong_thread;
        for (Stream* stream : streams)
            if (stream->capture == capture) stream->capture = nullptr;
        captures.erase(capture);
        if (!capture->valid) return capture_invalidated;
        *graph = new Graph{std::move(capture->nodes)};
        return success;
    });
}

Status exchange_mode(int* mode) {
    if (*mode < global || *mode > relaxed) return invalid_value;
    std::swap(*mode, thread_mode);
    return success;
}

Status is_capturing(Stream* handle, int* status) {
    return with_stream(handle, [&](Guard&, Stream* stream) -> Status {
        // As documented, the legacy stream is the one handle of which this may not be asked then.
        if (Status refused = require_no_implicit_capture(stream)) return refused;
        *status = !stream->capture ? 0 : stream->capture->valid ? 1 : 2;
        return success;
    });
}

Status launch_graph(Graph* graph, Stream* stream) {
    for (const Action& action : graph->nodes)
        if (Status status = enqueue(stream, action)) return status;
    return success;
}

Status require_safe() {
    Guard guard(mutex);
    return refuse_unsafe();
}

}  // namespace emulator
