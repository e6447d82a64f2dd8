// SPDX-License-Identifier: Apache-2.0

package content

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

// MaxSeconds is the longest that a response may take.
const MaxSeconds = 600

// Number reads an integer query or path value from low to high. It answers the
// request and returns false when there is none.
func Number(w http.ResponseWriter, name, text string, fallback, low, high uint64) (uint64, bool) {
	if text == "" {
		return fallback, true
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n < low || n > high {
		http.Error(w, fmt.Sprintf("%s must be a number from %d to %d", name, low, high), http.StatusBadRequest)
		return 0, false
	}
	return n, true
}

// Serve answers /bytes/N?seed=SEED&ms=MS: N bytes that follow from the
// seed, written in pieces over MS milliseconds.
func Serve(w http.ResponseWriter, r *http.Request) {
	n, ok := Number(w, "the number of bytes", r.PathValue("n"), 0, 0, Max)
	if !ok {
		return
	}
	seed, ok := Number(w, "seed", r.FormValue("seed"), 0, 0, 1<<64-1)
	if !ok {
		return
	}
	ms, ok := Number(w, "ms", r.FormValue("ms"), 0, 0, MaxSeconds*1000)
	if !ok {
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatUint(n, 10))
	body := New(seed, int64(n))
	buf := bufferPool.Get().(*buffers)
	defer bufferPool.Put(buf)
	if ms == 0 {
		_, _ = io.CopyBuffer(struct{ io.Writer }{w}, body, buf.want)
		return
	}
	const piece = 20 * time.Millisecond
	pieces := max(1, int64(time.Duration(ms)*time.Millisecond/piece))
	tick := time.NewTicker(piece)
	defer tick.Stop()
	for range pieces {
		if _, err := io.CopyBuffer(struct{ io.Writer }{w}, io.LimitReader(body, (int64(n)+pieces-1)/pieces), buf.want); err != nil {
			return
		}
		w.(http.Flusher).Flush()
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
}
