// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"errors"
	"log/slog"
	"net/http"

	"instar/dispatch"
	"instar/metrics"
)

// A server tells about its own group, which needs no rights but those that it has.
func Example() {
	group, err := dispatch.Open(dispatch.Options{Address: "127.0.0.1:443"})
	if err != nil {
		slog.Error("open group", "err", err)
		return
	}
	defer group.Close() // after the last scrape
	collector := metrics.New(metrics.Options{Groups: []*dispatch.Group{group}, Logger: slog.Default()})
	http.Handle("GET /metrics", metrics.Handler(collector))
	if err := http.ListenAndServe("127.0.0.1:9790", nil); !errors.Is(err, http.ErrServerClosed) {
		slog.Error("serve metrics", "err", err)
	}
}
