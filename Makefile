# Everything that a developer or a CI machine runs. Needs Go; -race needs gcc (see .ci/run).
GO           ?= go
GOLANGCI     ?= $(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
FUZZTIME     ?= 5s
CHAOSTIME    ?= 30m
TESTTIMEOUT  ?= 12m
RACE         ?= -race
BENCHFLAGS   ?=
PLANTEDFLAGS ?=
REPORTS      ?= bin/reports
NIGHTMINUTES ?= 60
PYTHON       ?= python3
WHEELFLAGS   ?=

.PHONY: all build test test-short race vet fmt fmt-check lint sim fuzz bench chaos planted merge nightly reliability rdma rdma-lint python python-test python-examples python-wheel clean

all: build

# The one binary, without C, stamped with the commit where there is one.
build:
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags "-X larder/cmd.commit=$$(git rev-parse --short=12 HEAD 2>/dev/null)" -o bin/larder ./cmd/larder

# What must be green before a change is merged.
test: fmt-check vet lint race sim fuzz

# The same without the slow parts: seconds, for use while editing.
test-short: fmt-check vet
	$(GO) test -short -shuffle=on ./...

race:
	$(GO) test $(RACE) -shuffle=on -timeout $(TESTTIMEOUT) ./...

# The simulator without the race detector, which would leave it a tenth of the seeds.
sim:
	$(GO) test -count=1 -timeout $(TESTTIMEOUT) ./integration/simtest

vet:
	$(GO) vet ./...
	CGO_ENABLED=0 GOARCH=arm64 $(GO) build ./...

fmt-check:
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "run make fmt; not formatted:"; echo "$$unformatted"; exit 1; fi

fmt:
	$(GOLANGCI) fmt ./...

lint:
	$(GOLANGCI) run ./...

# Every fuzz target for FUZZTIME. One target a run is all that go test allows. On a busy machine it may report the end of
# that time as a failure, without an input: then twice more at most.
fuzz:
	@set -e; for dir in $$(grep -rl --include='*_test.go' '^func Fuzz' . | xargs -n1 dirname | sort -u); do \
	  for target in $$(grep -h '^func Fuzz' $$dir/*_test.go | sed 's/^func \(Fuzz[A-Za-z0-9_]*\).*/\1/' | sort); do \
	    echo "fuzz $$dir $$target"; \
	    run="$(GO) test $$dir -run ^$$ -fuzz ^$$target\$$ -fuzztime $(FUZZTIME) -fuzzminimizetime 1s"; \
	    for try in 1 2 3; do \
	      if out=$$($$run 2>&1); then echo "$$out" | tail -1; break; fi; \
	      echo "$$out"; \
	      case "$$try $$out" in *"Failing input"*|3*) exit 1;; *"context deadline exceeded"*) ;; *) exit 1;; esac; \
	    done; \
	  done; \
	done

# The table of the README. BENCHFLAGS=--long adds the rows that take minutes.
bench: build
	bin/larder bench $(BENCHFLAGS)

# Faults against real processes, drawn at random, for CHAOSTIME; the default test run has a short one.
chaos:
	LARDER_CHAOS_TIME=$(CHAOSTIME) $(GO) test -count=1 -timeout 0 -v -run 'Chaos' ./integration

# What a change must stand before it is merged, in at most 20 minutes: 200 simulated clusters, 12 cases against real
# processes, the planted bugs. Writes docs/RELIABILITY.md.
merge:
	@mkdir -p $(REPORTS)
	$(GO) test -count=1 -timeout 0 ./integration/simtest -run '^TestSwarm$$' -seeds=200 -ticks=10000 -report=$(abspath $(REPORTS))/sim.json
	$(GO) test -count=1 -timeout 0 ./integration/chaos -run '^TestChaos$$' -cases=12 -report=$(abspath $(REPORTS))/chaos.json
	$(GO) run ./integration/planted --json $(REPORTS)/planted.json $(PLANTEDFLAGS)
	@$(MAKE) --no-print-directory reliability

# An hour of simulated clusters, an hour of random faults against real processes, one for each decoder.
nightly:
	@mkdir -p $(REPORTS)
	$(GO) test -count=1 -timeout 0 ./integration/simtest -run '^TestSwarm$$' -minutes=$(NIGHTMINUTES) -ticks=10000 -report=$(abspath $(REPORTS))/sim.json
	$(GO) test -count=1 -timeout 0 ./integration/chaos -run '^Test(Chaos|Random)$$' -cases=all -minutes=$(NIGHTMINUTES) -report=$(abspath $(REPORTS))/chaos.json
	$(GO) run ./integration/planted --json $(REPORTS)/planted.json $(PLANTEDFLAGS)
	$(MAKE) fuzz FUZZTIME=1m
	@$(MAKE) --no-print-directory reliability

# Writes docs/RELIABILITY.md from the reports of the last runs.
reliability:
	$(GO) run ./integration/reliability --reports $(REPORTS) > docs/RELIABILITY.md.new
	@mv docs/RELIABILITY.md.new docs/RELIABILITY.md

# Breaks the source in many ways, without touching it, and requires that tests notice each. PLANTEDFLAGS="--run NAME"
# takes some, --all asks every layer, --json FILE writes the report.
planted:
	$(GO) run ./integration/planted $(PLANTEDFLAGS)

# RDMA verbs against the kernel's software device, in a guest. Where none can be run it says so and does nothing. The first
# time it builds a kernel, in minutes.
rdma:
	@kernel=$$(integration/emul/uml-build.sh) || { rc=$$?; [ $$rc -eq 69 ] && exit 0; exit $$rc; }; \
	UML_KERNEL=$$kernel UML_TIMEOUT=600 $(GO) test -tags rdma -count=1 -timeout $(TESTTIMEOUT) \
	  -exec $(CURDIR)/integration/emul/uml-exec.sh ./transfer/verbs && \
	UML_KERNEL=$$kernel UML_TIMEOUT=600 $(GO) test -tags rdma -count=1 -timeout $(TESTTIMEOUT) -run RDMA \
	  -exec $(CURDIR)/integration/emul/uml-exec.sh ./pg

rdma-lint:
	$(GOLANGCI) run --build-tags rdma ./transfer/verbs/... ./pg

# The library that python/larder calls, where it looks for it. Needs a C compiler.
python:
	CGO_ENABLED=1 $(GO) build -trimpath -buildmode=c-shared -ldflags "-s -w" -o python/larder/liblarder.so ./python/native
	@rm -f python/larder/liblarder.h

# With any Python from 3.10 on; tests that need numpy or torch are skipped where these are missing.
python-test: python build
	cd python/tests && PYTHONPATH=.. $(PYTHON) -W error::ResourceWarning -m unittest discover $(PYTHONTESTFLAGS)

# The examples in Python, which start servers and check themselves. Without numpy they are skipped.
python-examples: python build
	cd examples/kvcache && PYTHONPATH=../../python $(PYTHON) -W error::ResourceWarning -m unittest

# pip fetches setuptools for it; WHEELFLAGS=--no-build-isolation takes the one that is there.
python-wheel: python
	$(PYTHON) -m pip wheel --no-deps $(WHEELFLAGS) -w bin ./python

clean:
	rm -rf bin data python/build python/larder.egg-info python/larder/liblarder.so
